"""Being here puts this folder on the import path, so that every test finds ``package_factory``."""
