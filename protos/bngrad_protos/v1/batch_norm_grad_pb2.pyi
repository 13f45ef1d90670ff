from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_FLOAT16: _ClassVar[DataType]
    DATA_TYPE_BFLOAT16: _ClassVar[DataType]
    DATA_TYPE_FLOAT32: _ClassVar[DataType]

class ReserveSpace2Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESERVE_SPACE2_KIND_UNSPECIFIED: _ClassVar[ReserveSpace2Kind]
    RESERVE_SPACE2_KIND_VARIANCE: _ClassVar[ReserveSpace2Kind]
    RESERVE_SPACE2_KIND_INVERSE_STD: _ClassVar[ReserveSpace2Kind]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_STARTING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_FLOAT16: DataType
DATA_TYPE_BFLOAT16: DataType
DATA_TYPE_FLOAT32: DataType
RESERVE_SPACE2_KIND_UNSPECIFIED: ReserveSpace2Kind
RESERVE_SPACE2_KIND_VARIANCE: ReserveSpace2Kind
RESERVE_SPACE2_KIND_INVERSE_STD: ReserveSpace2Kind
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_STARTING: WorkerState
WORKER_STATE_READY: WorkerState

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "data", "location", "ticket")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    dtype: DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    location: Location
    ticket: bytes
    def __init__(self, dtype: _Optional[_Union[DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., location: _Optional[_Union[Location, _Mapping]] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class Location(_message.Message):
    __slots__ = ("region_key", "offset")
    REGION_KEY_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    region_key: bytes
    offset: int
    def __init__(self, region_key: _Optional[bytes] = ..., offset: _Optional[int] = ...) -> None: ...

class FusedBatchNormGradV3Request(_message.Message):
    __slots__ = ("y_backprop", "x", "scale", "reserve_space_1", "reserve_space_2", "reserve_space_3", "epsilon", "data_format", "is_training", "reserve_space_2_kind", "x_backprop_location", "priority")
    Y_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    X_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    RESERVE_SPACE_1_FIELD_NUMBER: _ClassVar[int]
    RESERVE_SPACE_2_FIELD_NUMBER: _ClassVar[int]
    RESERVE_SPACE_3_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    DATA_FORMAT_FIELD_NUMBER: _ClassVar[int]
    IS_TRAINING_FIELD_NUMBER: _ClassVar[int]
    RESERVE_SPACE_2_KIND_FIELD_NUMBER: _ClassVar[int]
    X_BACKPROP_LOCATION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    y_backprop: Tensor
    x: Tensor
    scale: Tensor
    reserve_space_1: Tensor
    reserve_space_2: Tensor
    reserve_space_3: Tensor
    epsilon: float
    data_format: str
    is_training: bool
    reserve_space_2_kind: ReserveSpace2Kind
    x_backprop_location: Location
    priority: int
    def __init__(self, y_backprop: _Optional[_Union[Tensor, _Mapping]] = ..., x: _Optional[_Union[Tensor, _Mapping]] = ..., scale: _Optional[_Union[Tensor, _Mapping]] = ..., reserve_space_1: _Optional[_Union[Tensor, _Mapping]] = ..., reserve_space_2: _Optional[_Union[Tensor, _Mapping]] = ..., reserve_space_3: _Optional[_Union[Tensor, _Mapping]] = ..., epsilon: _Optional[float] = ..., data_format: _Optional[str] = ..., is_training: bool = ..., reserve_space_2_kind: _Optional[_Union[ReserveSpace2Kind, str]] = ..., x_backprop_location: _Optional[_Union[Location, _Mapping]] = ..., priority: _Optional[int] = ...) -> None: ...

class FusedBatchNormGradV3Response(_message.Message):
    __slots__ = ("x_backprop", "scale_backprop", "offset_backprop", "reserve_space_4", "reserve_space_5")
    X_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    SCALE_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    RESERVE_SPACE_4_FIELD_NUMBER: _ClassVar[int]
    RESERVE_SPACE_5_FIELD_NUMBER: _ClassVar[int]
    x_backprop: Tensor
    scale_backprop: Tensor
    offset_backprop: Tensor
    reserve_space_4: Tensor
    reserve_space_5: Tensor
    def __init__(self, x_backprop: _Optional[_Union[Tensor, _Mapping]] = ..., scale_backprop: _Optional[_Union[Tensor, _Mapping]] = ..., offset_backprop: _Optional[_Union[Tensor, _Mapping]] = ..., reserve_space_4: _Optional[_Union[Tensor, _Mapping]] = ..., reserve_space_5: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class FusedBatchNormGradV2Request(_message.Message):
    __slots__ = ("y_backprop", "x", "scale", "reserve_space_1", "reserve_space_2", "epsilon", "data_format", "is_training", "reserve_space_2_kind", "x_backprop_location", "priority")
    Y_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    X_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    RESERVE_SPACE_1_FIELD_NUMBER: _ClassVar[int]
    RESERVE_SPACE_2_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    DATA_FORMAT_FIELD_NUMBER: _ClassVar[int]
    IS_TRAINING_FIELD_NUMBER: _ClassVar[int]
    RESERVE_SPACE_2_KIND_FIELD_NUMBER: _ClassVar[int]
    X_BACKPROP_LOCATION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    y_backprop: Tensor
    x: Tensor
    scale: Tensor
    reserve_space_1: Tensor
    reserve_space_2: Tensor
    epsilon: float
    data_format: str
    is_training: bool
    reserve_space_2_kind: ReserveSpace2Kind
    x_backprop_location: Location
    priority: int
    def __init__(self, y_backprop: _Optional[_Union[Tensor, _Mapping]] = ..., x: _Optional[_Union[Tensor, _Mapping]] = ..., scale: _Optional[_Union[Tensor, _Mapping]] = ..., reserve_space_1: _Optional[_Union[Tensor, _Mapping]] = ..., reserve_space_2: _Optional[_Union[Tensor, _Mapping]] = ..., epsilon: _Optional[float] = ..., data_format: _Optional[str] = ..., is_training: bool = ..., reserve_space_2_kind: _Optional[_Union[ReserveSpace2Kind, str]] = ..., x_backprop_location: _Optional[_Union[Location, _Mapping]] = ..., priority: _Optional[int] = ...) -> None: ...

class FusedBatchNormGradV2Response(_message.Message):
    __slots__ = ("x_backprop", "scale_backprop", "offset_backprop", "reserve_space_3", "reserve_space_4")
    X_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    SCALE_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    RESERVE_SPACE_3_FIELD_NUMBER: _ClassVar[int]
    RESERVE_SPACE_4_FIELD_NUMBER: _ClassVar[int]
    x_backprop: Tensor
    scale_backprop: Tensor
    offset_backprop: Tensor
    reserve_space_3: Tensor
    reserve_space_4: Tensor
    def __init__(self, x_backprop: _Optional[_Union[Tensor, _Mapping]] = ..., scale_backprop: _Optional[_Union[Tensor, _Mapping]] = ..., offset_backprop: _Optional[_Union[Tensor, _Mapping]] = ..., reserve_space_3: _Optional[_Union[Tensor, _Mapping]] = ..., reserve_space_4: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class BatchNormTrainingBackpropRequest(_message.Message):
    __slots__ = ("input_forward", "output_delta", "mean", "variance", "gamma", "epsilon", "data_format", "input_delta_location", "priority", "variance_kind")
    INPUT_FORWARD_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_DELTA_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    VARIANCE_FIELD_NUMBER: _ClassVar[int]
    GAMMA_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    DATA_FORMAT_FIELD_NUMBER: _ClassVar[int]
    INPUT_DELTA_LOCATION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    VARIANCE_KIND_FIELD_NUMBER: _ClassVar[int]
    input_forward: Tensor
    output_delta: Tensor
    mean: Tensor
    variance: Tensor
    gamma: Tensor
    epsilon: float
    data_format: str
    input_delta_location: Location
    priority: int
    variance_kind: ReserveSpace2Kind
    def __init__(self, input_forward: _Optional[_Union[Tensor, _Mapping]] = ..., output_delta: _Optional[_Union[Tensor, _Mapping]] = ..., mean: _Optional[_Union[Tensor, _Mapping]] = ..., variance: _Optional[_Union[Tensor, _Mapping]] = ..., gamma: _Optional[_Union[Tensor, _Mapping]] = ..., epsilon: _Optional[float] = ..., data_format: _Optional[str] = ..., input_delta_location: _Optional[_Union[Location, _Mapping]] = ..., priority: _Optional[int] = ..., variance_kind: _Optional[_Union[ReserveSpace2Kind, str]] = ...) -> None: ...

class BatchNormTrainingBackpropResponse(_message.Message):
    __slots__ = ("input_delta", "gamma_delta", "beta_delta")
    INPUT_DELTA_FIELD_NUMBER: _ClassVar[int]
    GAMMA_DELTA_FIELD_NUMBER: _ClassVar[int]
    BETA_DELTA_FIELD_NUMBER: _ClassVar[int]
    input_delta: Tensor
    gamma_delta: Tensor
    beta_delta: Tensor
    def __init__(self, input_delta: _Optional[_Union[Tensor, _Mapping]] = ..., gamma_delta: _Optional[_Union[Tensor, _Mapping]] = ..., beta_delta: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class FusedBatchNormGradGradRequest(_message.Message):
    __slots__ = ("grad_x_backprop", "grad_scale_backprop", "grad_offset_backprop", "y_backprop", "x", "scale", "reserve_space_1", "reserve_space_2", "epsilon", "data_format", "is_training", "reserve_space_2_kind", "grad_y_backprop_location", "grad_x_location", "priority")
    GRAD_X_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    GRAD_SCALE_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    GRAD_OFFSET_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    Y_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    X_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    RESERVE_SPACE_1_FIELD_NUMBER: _ClassVar[int]
    RESERVE_SPACE_2_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    DATA_FORMAT_FIELD_NUMBER: _ClassVar[int]
    IS_TRAINING_FIELD_NUMBER: _ClassVar[int]
    RESERVE_SPACE_2_KIND_FIELD_NUMBER: _ClassVar[int]
    GRAD_Y_BACKPROP_LOCATION_FIELD_NUMBER: _ClassVar[int]
    GRAD_X_LOCATION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    grad_x_backprop: Tensor
    grad_scale_backprop: Tensor
    grad_offset_backprop: Tensor
    y_backprop: Tensor
    x: Tensor
    scale: Tensor
    reserve_space_1: Tensor
    reserve_space_2: Tensor
    epsilon: float
    data_format: str
    is_training: bool
    reserve_space_2_kind: ReserveSpace2Kind
    grad_y_backprop_location: Location
    grad_x_location: Location
    priority: int
    def __init__(self, grad_x_backprop: _Optional[_Union[Tensor, _Mapping]] = ..., grad_scale_backprop: _Optional[_Union[Tensor, _Mapping]] = ..., grad_offset_backprop: _Optional[_Union[Tensor, _Mapping]] = ..., y_backprop: _Optional[_Union[Tensor, _Mapping]] = ..., x: _Optional[_Union[Tensor, _Mapping]] = ..., scale: _Optional[_Union[Tensor, _Mapping]] = ..., reserve_space_1: _Optional[_Union[Tensor, _Mapping]] = ..., reserve_space_2: _Optional[_Union[Tensor, _Mapping]] = ..., epsilon: _Optional[float] = ..., data_format: _Optional[str] = ..., is_training: bool = ..., reserve_space_2_kind: _Optional[_Union[ReserveSpace2Kind, str]] = ..., grad_y_backprop_location: _Optional[_Union[Location, _Mapping]] = ..., grad_x_location: _Optional[_Union[Location, _Mapping]] = ..., priority: _Optional[int] = ...) -> None: ...

class FusedBatchNormGradGradResponse(_message.Message):
    __slots__ = ("grad_y_backprop", "grad_x", "grad_scale")
    GRAD_Y_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    GRAD_X_FIELD_NUMBER: _ClassVar[int]
    GRAD_SCALE_FIELD_NUMBER: _ClassVar[int]
    grad_y_backprop: Tensor
    grad_x: Tensor
    grad_scale: Tensor
    def __init__(self, grad_y_backprop: _Optional[_Union[Tensor, _Mapping]] = ..., grad_x: _Optional[_Union[Tensor, _Mapping]] = ..., grad_scale: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class ExchangeRequest(_message.Message):
    __slots__ = ("fused_batch_norm_grad_v3", "fused_batch_norm_grad_v2", "batch_norm_training_backprop", "chunk", "fused_batch_norm_grad_grad")
    FUSED_BATCH_NORM_GRAD_V3_FIELD_NUMBER: _ClassVar[int]
    FUSED_BATCH_NORM_GRAD_V2_FIELD_NUMBER: _ClassVar[int]
    BATCH_NORM_TRAINING_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FUSED_BATCH_NORM_GRAD_GRAD_FIELD_NUMBER: _ClassVar[int]
    fused_batch_norm_grad_v3: FusedBatchNormGradV3Request
    fused_batch_norm_grad_v2: FusedBatchNormGradV2Request
    batch_norm_training_backprop: BatchNormTrainingBackpropRequest
    chunk: bytes
    fused_batch_norm_grad_grad: FusedBatchNormGradGradRequest
    def __init__(self, fused_batch_norm_grad_v3: _Optional[_Union[FusedBatchNormGradV3Request, _Mapping]] = ..., fused_batch_norm_grad_v2: _Optional[_Union[FusedBatchNormGradV2Request, _Mapping]] = ..., batch_norm_training_backprop: _Optional[_Union[BatchNormTrainingBackpropRequest, _Mapping]] = ..., chunk: _Optional[bytes] = ..., fused_batch_norm_grad_grad: _Optional[_Union[FusedBatchNormGradGradRequest, _Mapping]] = ...) -> None: ...

class ExchangeResponse(_message.Message):
    __slots__ = ("fused_batch_norm_grad_v3", "fused_batch_norm_grad_v2", "batch_norm_training_backprop", "chunk", "fused_batch_norm_grad_grad")
    FUSED_BATCH_NORM_GRAD_V3_FIELD_NUMBER: _ClassVar[int]
    FUSED_BATCH_NORM_GRAD_V2_FIELD_NUMBER: _ClassVar[int]
    BATCH_NORM_TRAINING_BACKPROP_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FUSED_BATCH_NORM_GRAD_GRAD_FIELD_NUMBER: _ClassVar[int]
    fused_batch_norm_grad_v3: FusedBatchNormGradV3Response
    fused_batch_norm_grad_v2: FusedBatchNormGradV2Response
    batch_norm_training_backprop: BatchNormTrainingBackpropResponse
    chunk: bytes
    fused_batch_norm_grad_grad: FusedBatchNormGradGradResponse
    def __init__(self, fused_batch_norm_grad_v3: _Optional[_Union[FusedBatchNormGradV3Response, _Mapping]] = ..., fused_batch_norm_grad_v2: _Optional[_Union[FusedBatchNormGradV2Response, _Mapping]] = ..., batch_norm_training_backprop: _Optional[_Union[BatchNormTrainingBackpropResponse, _Mapping]] = ..., chunk: _Optional[bytes] = ..., fused_batch_norm_grad_grad: _Optional[_Union[FusedBatchNormGradGradResponse, _Mapping]] = ...) -> None: ...

class SendAheadRequest(_message.Message):
    __slots__ = ("tensor", "forget", "chunk")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    tensor: Tensor
    forget: _containers.RepeatedScalarFieldContainer[bytes]
    chunk: bytes
    def __init__(self, tensor: _Optional[_Union[Tensor, _Mapping]] = ..., forget: _Optional[_Iterable[bytes]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class SendAheadResponse(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    def __init__(self, ticket: _Optional[bytes] = ...) -> None: ...

class ServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Device(_message.Message):
    __slots__ = ("name", "description", "state", "restarts", "memory_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    state: WorkerState
    restarts: int
    memory_bytes: int
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., state: _Optional[_Union[WorkerState, str]] = ..., restarts: _Optional[int] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_message_bytes", "arena_bytes")
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_message_bytes: int
    arena_bytes: int
    def __init__(self, max_message_bytes: _Optional[int] = ..., arena_bytes: _Optional[int] = ...) -> None: ...

class Endpoints(_message.Message):
    __slots__ = ("stream_port", "local_directory", "stream_host", "copied_ahead_bytes", "is_at_given_port")
    STREAM_PORT_FIELD_NUMBER: _ClassVar[int]
    LOCAL_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    STREAM_HOST_FIELD_NUMBER: _ClassVar[int]
    COPIED_AHEAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_AT_GIVEN_PORT_FIELD_NUMBER: _ClassVar[int]
    stream_port: int
    local_directory: str
    stream_host: str
    copied_ahead_bytes: int
    is_at_given_port: bool
    def __init__(self, stream_port: _Optional[int] = ..., local_directory: _Optional[str] = ..., stream_host: _Optional[str] = ..., copied_ahead_bytes: _Optional[int] = ..., is_at_given_port: bool = ...) -> None: ...

class ServerInfoResponse(_message.Message):
    __slots__ = ("version", "devices", "limits", "ops", "endpoints", "requests", "batch_sizes", "device_remark", "compiling", "unread_connections")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    OPS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_REMARK_FIELD_NUMBER: _ClassVar[int]
    COMPILING_FIELD_NUMBER: _ClassVar[int]
    UNREAD_CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    version: str
    devices: _containers.RepeatedCompositeFieldContainer[Device]
    limits: Limits
    ops: _containers.RepeatedScalarFieldContainer[str]
    endpoints: Endpoints
    requests: int
    batch_sizes: _containers.RepeatedScalarFieldContainer[int]
    device_remark: str
    compiling: _containers.RepeatedScalarFieldContainer[str]
    unread_connections: int
    def __init__(self, version: _Optional[str] = ..., devices: _Optional[_Iterable[_Union[Device, _Mapping]]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., ops: _Optional[_Iterable[str]] = ..., endpoints: _Optional[_Union[Endpoints, _Mapping]] = ..., requests: _Optional[int] = ..., batch_sizes: _Optional[_Iterable[int]] = ..., device_remark: _Optional[str] = ..., compiling: _Optional[_Iterable[str]] = ..., unread_connections: _Optional[int] = ...) -> None: ...
