"""What tells compiled code from code that runs eagerly, under TorchRec's path."""
