"""The models that a server has: how they are loaded and how requests find them."""
