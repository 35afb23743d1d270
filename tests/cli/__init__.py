"""What the programs say of themselves, all together."""
