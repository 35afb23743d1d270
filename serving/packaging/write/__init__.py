"""The package file as it is written: golden answers, records and large buffers."""
