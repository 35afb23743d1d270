"""What the pages of docs/ and their site promise."""
