"""The transforms, one file each; `tessera.training.transforms.transform` registers and parses them."""
