"""Runs side by side: `runs` reads what a run folder holds, `table` finds what differs and shows it."""
