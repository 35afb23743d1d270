"""The sharding types, one a file: how ids travel, which rows are here, how vectors travel back."""
