from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FloatFeatures(_message.Message):
    __slots__ = ("num_features", "values")
    NUM_FEATURES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    num_features: int
    values: bytes
    def __init__(self, num_features: _Optional[int] = ..., values: _Optional[bytes] = ...) -> None: ...

class SparseFeatures(_message.Message):
    __slots__ = ("num_features", "lengths", "values", "weights", "values_int64", "values_bytes")
    NUM_FEATURES_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    VALUES_INT64_FIELD_NUMBER: _ClassVar[int]
    VALUES_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_features: int
    lengths: bytes
    values: bytes
    weights: bytes
    values_int64: bytes
    values_bytes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, num_features: _Optional[int] = ..., lengths: _Optional[bytes] = ..., values: _Optional[bytes] = ..., weights: _Optional[bytes] = ..., values_int64: _Optional[bytes] = ..., values_bytes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SharedFeatures(_message.Message):
    __slots__ = ("names", "num_rows", "features", "row_index")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    ROW_INDEX_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    num_rows: int
    features: SparseFeatures
    row_index: bytes
    def __init__(self, names: _Optional[_Iterable[str]] = ..., num_rows: _Optional[int] = ..., features: _Optional[_Union[SparseFeatures, _Mapping]] = ..., row_index: _Optional[bytes] = ...) -> None: ...

class PredictionRequest(_message.Message):
    __slots__ = ("batch_size", "float_features", "id_list_features", "id_score_list_features", "embedding_features", "unary_features", "model_name", "model_version", "priority", "shared_features", "traffic_key")
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    FLOAT_FEATURES_FIELD_NUMBER: _ClassVar[int]
    ID_LIST_FEATURES_FIELD_NUMBER: _ClassVar[int]
    ID_SCORE_LIST_FEATURES_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FEATURES_FIELD_NUMBER: _ClassVar[int]
    UNARY_FEATURES_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SHARED_FEATURES_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_KEY_FIELD_NUMBER: _ClassVar[int]
    batch_size: int
    float_features: FloatFeatures
    id_list_features: SparseFeatures
    id_score_list_features: SparseFeatures
    embedding_features: FloatFeatures
    unary_features: SparseFeatures
    model_name: str
    model_version: str
    priority: int
    shared_features: SharedFeatures
    traffic_key: str
    def __init__(self, batch_size: _Optional[int] = ..., float_features: _Optional[_Union[FloatFeatures, _Mapping]] = ..., id_list_features: _Optional[_Union[SparseFeatures, _Mapping]] = ..., id_score_list_features: _Optional[_Union[SparseFeatures, _Mapping]] = ..., embedding_features: _Optional[_Union[FloatFeatures, _Mapping]] = ..., unary_features: _Optional[_Union[SparseFeatures, _Mapping]] = ..., model_name: _Optional[str] = ..., model_version: _Optional[str] = ..., priority: _Optional[int] = ..., shared_features: _Optional[_Union[SharedFeatures, _Mapping]] = ..., traffic_key: _Optional[str] = ...) -> None: ...

class FloatVec(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, data: _Optional[_Iterable[float]] = ...) -> None: ...

class StageTimings(_message.Message):
    __slots__ = ("decode_us", "queue_us", "assemble_us", "transfer_us", "forward_us", "split_us", "batch_requests", "batch_samples")
    DECODE_US_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    ASSEMBLE_US_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_US_FIELD_NUMBER: _ClassVar[int]
    FORWARD_US_FIELD_NUMBER: _ClassVar[int]
    SPLIT_US_FIELD_NUMBER: _ClassVar[int]
    BATCH_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    decode_us: int
    queue_us: int
    assemble_us: int
    transfer_us: int
    forward_us: int
    split_us: int
    batch_requests: int
    batch_samples: int
    def __init__(self, decode_us: _Optional[int] = ..., queue_us: _Optional[int] = ..., assemble_us: _Optional[int] = ..., transfer_us: _Optional[int] = ..., forward_us: _Optional[int] = ..., split_us: _Optional[int] = ..., batch_requests: _Optional[int] = ..., batch_samples: _Optional[int] = ...) -> None: ...

class PredictionResponse(_message.Message):
    __slots__ = ("predictions", "model_name", "model_version", "timings", "model_commit")
    class PredictionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: FloatVec
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[FloatVec, _Mapping]] = ...) -> None: ...
    PREDICTIONS_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    MODEL_COMMIT_FIELD_NUMBER: _ClassVar[int]
    predictions: _containers.MessageMap[str, FloatVec]
    model_name: str
    model_version: str
    timings: StageTimings
    model_commit: int
    def __init__(self, predictions: _Optional[_Mapping[str, FloatVec]] = ..., model_name: _Optional[str] = ..., model_version: _Optional[str] = ..., timings: _Optional[_Union[StageTimings, _Mapping]] = ..., model_commit: _Optional[int] = ...) -> None: ...
