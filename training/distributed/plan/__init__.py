"""What a plan says of each table, and what sharders and sharded modules promise."""
