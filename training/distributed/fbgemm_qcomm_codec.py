"""The names of ``torchrec.distributed.fbgemm_qcomm_codec``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.comm.codecs import (
    CommType as CommType, DEFAULT_ROW_DIM as DEFAULT_ROW_DIM, Fp8Codec as Fp8Codec,
    HalfCodec as HalfCodec, Int8Codec as Int8Codec, Mx4Codec as Mx4Codec, QCommsConfig as QCommsConfig,
    get_qcomm_codecs as get_qcomm_codecs, get_qcomm_codecs_registry as get_qcomm_codecs_registry,
)
