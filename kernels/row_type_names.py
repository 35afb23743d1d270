"""Generated from kernels/row_types.py by `make row-types`; not to be edited."""

ROW_TYPE_NEEDS = {
    "int8": "",
    "int4": "dimensions that are multiples of 2",
    "int8b": "--backend tessera and dimensions that are multiples of 16",
    "int2": "--backend fbgemm and dimensions that are multiples of 4",
    "fp8": "--backend tessera",
    "fp16": "",
    "bf16": "--backend tessera",
    "fp32": "",
}
"""What each row type needs, by its name; empty where it can be used everywhere."""
