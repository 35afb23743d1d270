"""What stands between raw values and the tables and layers of a model, inside its graph."""
