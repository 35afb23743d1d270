"""What travels between ranks: ids to the rows that they name, vectors back."""
