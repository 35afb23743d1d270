"""How the tables of one rank are stored, looked up and updated."""
