from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_UNSPECIFIED: _ClassVar[Kind]
    KIND_PARAM: _ClassVar[Kind]
    KIND_GRAD: _ClassVar[Kind]
    KIND_OPTIM: _ClassVar[Kind]
    KIND_ACTIVATION: _ClassVar[Kind]

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    MODE_CREATE: _ClassVar[Mode]
    MODE_READ: _ClassVar[Mode]
    MODE_UPDATE: _ClassVar[Mode]
    MODE_CONSUME: _ClassVar[Mode]

class NoticeKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NOTICE_KIND_UNSPECIFIED: _ClassVar[NoticeKind]
    NOTICE_KIND_PAGE_MOVES: _ClassVar[NoticeKind]
    NOTICE_KIND_STORAGE_SWITCH: _ClassVar[NoticeKind]
    NOTICE_KIND_FILE_REFUSED: _ClassVar[NoticeKind]
    NOTICE_KIND_FILE_CHANGED: _ClassVar[NoticeKind]
    NOTICE_KIND_COMPILED_ACROSS_UNITS: _ClassVar[NoticeKind]
    NOTICE_KIND_COMPILE_UNSEEN: _ClassVar[NoticeKind]
    NOTICE_KIND_PAGEABLE_COPIES: _ClassVar[NoticeKind]
    NOTICE_KIND_UPDATE_BARRIER: _ClassVar[NoticeKind]
    NOTICE_KIND_UPDATE_NOT_EARLY: _ClassVar[NoticeKind]
    NOTICE_KIND_ACTIVATIONS_KEPT: _ClassVar[NoticeKind]
    NOTICE_KIND_ACCUMULATION_ORDER: _ClassVar[NoticeKind]

class DeviceKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DEVICE_KIND_UNSPECIFIED: _ClassVar[DeviceKind]
    DEVICE_KIND_EMULATED: _ClassVar[DeviceKind]
    DEVICE_KIND_CUDA: _ClassVar[DeviceKind]

class AccessKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACCESS_KIND_UNSPECIFIED: _ClassVar[AccessKind]
    ACCESS_KIND_FORWARD: _ClassVar[AccessKind]
    ACCESS_KIND_BACKWARD: _ClassVar[AccessKind]
    ACCESS_KIND_RECOMPUTE: _ClassVar[AccessKind]
    ACCESS_KIND_UPDATE: _ClassVar[AccessKind]
KIND_UNSPECIFIED: Kind
KIND_PARAM: Kind
KIND_GRAD: Kind
KIND_OPTIM: Kind
KIND_ACTIVATION: Kind
MODE_UNSPECIFIED: Mode
MODE_CREATE: Mode
MODE_READ: Mode
MODE_UPDATE: Mode
MODE_CONSUME: Mode
NOTICE_KIND_UNSPECIFIED: NoticeKind
NOTICE_KIND_PAGE_MOVES: NoticeKind
NOTICE_KIND_STORAGE_SWITCH: NoticeKind
NOTICE_KIND_FILE_REFUSED: NoticeKind
NOTICE_KIND_FILE_CHANGED: NoticeKind
NOTICE_KIND_COMPILED_ACROSS_UNITS: NoticeKind
NOTICE_KIND_COMPILE_UNSEEN: NoticeKind
NOTICE_KIND_PAGEABLE_COPIES: NoticeKind
NOTICE_KIND_UPDATE_BARRIER: NoticeKind
NOTICE_KIND_UPDATE_NOT_EARLY: NoticeKind
NOTICE_KIND_ACTIVATIONS_KEPT: NoticeKind
NOTICE_KIND_ACCUMULATION_ORDER: NoticeKind
DEVICE_KIND_UNSPECIFIED: DeviceKind
DEVICE_KIND_EMULATED: DeviceKind
DEVICE_KIND_CUDA: DeviceKind
ACCESS_KIND_UNSPECIFIED: AccessKind
ACCESS_KIND_FORWARD: AccessKind
ACCESS_KIND_BACKWARD: AccessKind
ACCESS_KIND_RECOMPUTE: AccessKind
ACCESS_KIND_UPDATE: AccessKind

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("version", "protocol", "pid", "side_socket", "dram_capacity_bytes", "dram_free_bytes", "embedded")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SIDE_SOCKET_FIELD_NUMBER: _ClassVar[int]
    DRAM_CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAM_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    EMBEDDED_FIELD_NUMBER: _ClassVar[int]
    version: str
    protocol: int
    pid: int
    side_socket: str
    dram_capacity_bytes: int
    dram_free_bytes: int
    embedded: bool
    def __init__(self, version: _Optional[str] = ..., protocol: _Optional[int] = ..., pid: _Optional[int] = ..., side_socket: _Optional[str] = ..., dram_capacity_bytes: _Optional[int] = ..., dram_free_bytes: _Optional[int] = ..., embedded: _Optional[bool] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("stats_json",)
    STATS_JSON_FIELD_NUMBER: _ClassVar[int]
    stats_json: bytes
    def __init__(self, stats_json: _Optional[bytes] = ...) -> None: ...

class GetTraceRequest(_message.Message):
    __slots__ = ("job", "seconds", "daemon_only")
    JOB_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    DAEMON_ONLY_FIELD_NUMBER: _ClassVar[int]
    job: str
    seconds: float
    daemon_only: bool
    def __init__(self, job: _Optional[str] = ..., seconds: _Optional[float] = ..., daemon_only: _Optional[bool] = ...) -> None: ...

class GetTraceResponse(_message.Message):
    __slots__ = ("job", "now_s", "processes")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NOW_S_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    job: str
    now_s: float
    processes: _containers.RepeatedCompositeFieldContainer[TracedProcess]
    def __init__(self, job: _Optional[str] = ..., now_s: _Optional[float] = ..., processes: _Optional[_Iterable[_Union[TracedProcess, _Mapping]]] = ...) -> None: ...

class TracedProcess(_message.Message):
    __slots__ = ("name", "pid", "spans", "notes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    pid: int
    spans: Spans
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., pid: _Optional[int] = ..., spans: _Optional[_Union[Spans, _Mapping]] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class Spans(_message.Message):
    __slots__ = ("texts", "rows", "complete")
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    rows: bytes
    complete: bool
    def __init__(self, texts: _Optional[_Iterable[str]] = ..., rows: _Optional[bytes] = ..., complete: _Optional[bool] = ...) -> None: ...

class ClientMessage(_message.Message):
    __slots__ = ("open", "declare", "admit", "demand", "commit", "done", "discard", "close", "adopt", "notice", "void", "used", "accessed", "batch", "trace", "device_report", "supersede")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    DECLARE_FIELD_NUMBER: _ClassVar[int]
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    DEMAND_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    DISCARD_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    ADOPT_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    VOID_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    ACCESSED_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_REPORT_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDE_FIELD_NUMBER: _ClassVar[int]
    open: Open
    declare: Declare
    admit: Admit
    demand: Demand
    commit: Commit
    done: Done
    discard: Discard
    close: Close
    adopt: Adopt
    notice: Notice
    void: Void
    used: Used
    accessed: Accessed
    batch: ClientBatch
    trace: Trace
    device_report: DeviceReport
    supersede: Supersede
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., declare: _Optional[_Union[Declare, _Mapping]] = ..., admit: _Optional[_Union[Admit, _Mapping]] = ..., demand: _Optional[_Union[Demand, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., discard: _Optional[_Union[Discard, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ..., adopt: _Optional[_Union[Adopt, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ..., void: _Optional[_Union[Void, _Mapping]] = ..., used: _Optional[_Union[Used, _Mapping]] = ..., accessed: _Optional[_Union[Accessed, _Mapping]] = ..., batch: _Optional[_Union[ClientBatch, _Mapping]] = ..., trace: _Optional[_Union[Trace, _Mapping]] = ..., device_report: _Optional[_Union[DeviceReport, _Mapping]] = ..., supersede: _Optional[_Union[Supersede, _Mapping]] = ...) -> None: ...

class ClientBatch(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ClientMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ClientMessage, _Mapping]]] = ...) -> None: ...

class DaemonBatch(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[DaemonMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[DaemonMessage, _Mapping]]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("token", "protocol", "job", "dram_bytes", "flash_bytes", "version")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    FLASH_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    protocol: int
    job: str
    dram_bytes: int
    flash_bytes: int
    version: str
    def __init__(self, token: _Optional[bytes] = ..., protocol: _Optional[int] = ..., job: _Optional[str] = ..., dram_bytes: _Optional[int] = ..., flash_bytes: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class Declare(_message.Message):
    __slots__ = ("specs",)
    SPECS_FIELD_NUMBER: _ClassVar[int]
    specs: _containers.RepeatedCompositeFieldContainer[Spec]
    def __init__(self, specs: _Optional[_Iterable[_Union[Spec, _Mapping]]] = ...) -> None: ...

class Spec(_message.Message):
    __slots__ = ("spec_id", "kind", "unit", "nbytes", "tensors", "heir_of")
    SPEC_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    HEIR_OF_FIELD_NUMBER: _ClassVar[int]
    spec_id: int
    kind: Kind
    unit: str
    nbytes: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    heir_of: int
    def __init__(self, spec_id: _Optional[int] = ..., kind: _Optional[_Union[Kind, str]] = ..., unit: _Optional[str] = ..., nbytes: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., heir_of: _Optional[int] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape", "offset_bytes", "nbytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset_bytes: int
    nbytes: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., offset_bytes: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class Adopt(_message.Message):
    __slots__ = ("spec_id", "file", "offsets", "digests")
    SPEC_ID_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    spec_id: int
    file: int
    offsets: bytes
    digests: bytes
    def __init__(self, spec_id: _Optional[int] = ..., file: _Optional[int] = ..., offsets: _Optional[bytes] = ..., digests: _Optional[bytes] = ...) -> None: ...

class Admit(_message.Message):
    __slots__ = ("lane", "floor_specs")
    LANE_FIELD_NUMBER: _ClassVar[int]
    FLOOR_SPECS_FIELD_NUMBER: _ClassVar[int]
    lane: str
    floor_specs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lane: _Optional[str] = ..., floor_specs: _Optional[_Iterable[int]] = ...) -> None: ...

class Demand(_message.Message):
    __slots__ = ("lane", "epoch", "held", "target", "mode")
    LANE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    lane: str
    epoch: int
    held: bytes
    target: int
    mode: Mode
    def __init__(self, lane: _Optional[str] = ..., epoch: _Optional[int] = ..., held: _Optional[bytes] = ..., target: _Optional[int] = ..., mode: _Optional[_Union[Mode, str]] = ...) -> None: ...

class Void(_message.Message):
    __slots__ = ("lane", "epoch", "held")
    LANE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    lane: str
    epoch: int
    held: bytes
    def __init__(self, lane: _Optional[str] = ..., epoch: _Optional[int] = ..., held: _Optional[bytes] = ...) -> None: ...

class Used(_message.Message):
    __slots__ = ("serials",)
    SERIALS_FIELD_NUMBER: _ClassVar[int]
    serials: bytes
    def __init__(self, serials: _Optional[bytes] = ...) -> None: ...

class Accessed(_message.Message):
    __slots__ = ("lane", "unit", "kind", "training")
    LANE_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    lane: str
    unit: str
    kind: AccessKind
    training: bool
    def __init__(self, lane: _Optional[str] = ..., unit: _Optional[str] = ..., kind: _Optional[_Union[AccessKind, str]] = ..., training: _Optional[bool] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("updated", "consumed")
    UPDATED_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    updated: bytes
    consumed: bytes
    def __init__(self, updated: _Optional[bytes] = ..., consumed: _Optional[bytes] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("serials",)
    SERIALS_FIELD_NUMBER: _ClassVar[int]
    serials: bytes
    def __init__(self, serials: _Optional[bytes] = ...) -> None: ...

class Discard(_message.Message):
    __slots__ = ("bundles",)
    BUNDLES_FIELD_NUMBER: _ClassVar[int]
    bundles: bytes
    def __init__(self, bundles: _Optional[bytes] = ...) -> None: ...

class Supersede(_message.Message):
    __slots__ = ("pairs",)
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    pairs: bytes
    def __init__(self, pairs: _Optional[bytes] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("kind", "count", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: NoticeKind
    count: int
    text: str
    def __init__(self, kind: _Optional[_Union[NoticeKind, str]] = ..., count: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class DeviceReport(_message.Message):
    __slots__ = ("capacity_bytes", "used_bytes", "inward", "outward", "kind")
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    INWARD_FIELD_NUMBER: _ClassVar[int]
    OUTWARD_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    capacity_bytes: int
    used_bytes: int
    inward: DeviceLinkCount
    outward: DeviceLinkCount
    kind: DeviceKind
    def __init__(self, capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., inward: _Optional[_Union[DeviceLinkCount, _Mapping]] = ..., outward: _Optional[_Union[DeviceLinkCount, _Mapping]] = ..., kind: _Optional[_Union[DeviceKind, str]] = ...) -> None: ...

class DeviceLinkCount(_message.Message):
    __slots__ = ("bytes", "transfers", "seconds", "queue_seconds")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    transfers: int
    seconds: float
    queue_seconds: float
    def __init__(self, bytes: _Optional[int] = ..., transfers: _Optional[int] = ..., seconds: _Optional[float] = ..., queue_seconds: _Optional[float] = ...) -> None: ...

class Trace(_message.Message):
    __slots__ = ("id", "now_s", "spans")
    ID_FIELD_NUMBER: _ClassVar[int]
    NOW_S_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    id: int
    now_s: float
    spans: Spans
    def __init__(self, id: _Optional[int] = ..., now_s: _Optional[float] = ..., spans: _Optional[_Union[Spans, _Mapping]] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DaemonMessage(_message.Message):
    __slots__ = ("opened", "admitted", "grant", "refuse", "alive", "closed", "adopted", "surrender", "batch", "grants", "ask_trace")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    REFUSE_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    SURRENDER_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    ASK_TRACE_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    admitted: Admitted
    grant: Grant
    refuse: Refuse
    alive: Alive
    closed: Closed
    adopted: Adopted
    surrender: Surrender
    batch: DaemonBatch
    grants: Grants
    ask_trace: AskTrace
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., admitted: _Optional[_Union[Admitted, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., refuse: _Optional[_Union[Refuse, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ..., closed: _Optional[_Union[Closed, _Mapping]] = ..., adopted: _Optional[_Union[Adopted, _Mapping]] = ..., surrender: _Optional[_Union[Surrender, _Mapping]] = ..., batch: _Optional[_Union[DaemonBatch, _Mapping]] = ..., grants: _Optional[_Union[Grants, _Mapping]] = ..., ask_trace: _Optional[_Union[AskTrace, _Mapping]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("session", "job", "arena_bytes", "frame_bytes", "bundle_cap_bytes", "flash_quota_bytes", "version")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_CAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    FLASH_QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    job: str
    arena_bytes: int
    frame_bytes: int
    bundle_cap_bytes: int
    flash_quota_bytes: int
    version: str
    def __init__(self, session: _Optional[str] = ..., job: _Optional[str] = ..., arena_bytes: _Optional[int] = ..., frame_bytes: _Optional[int] = ..., bundle_cap_bytes: _Optional[int] = ..., flash_quota_bytes: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("lane", "budget_frames", "code", "message")
    LANE_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FRAMES_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    lane: str
    budget_frames: int
    code: str
    message: str
    def __init__(self, lane: _Optional[str] = ..., budget_frames: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Adopted(_message.Message):
    __slots__ = ("spec_id", "bundle", "code", "message")
    SPEC_ID_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    spec_id: int
    bundle: int
    code: str
    message: str
    def __init__(self, spec_id: _Optional[int] = ..., bundle: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("serial", "lane", "epoch", "bundle", "mode", "version", "runs", "answers", "spec")
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    serial: int
    lane: str
    epoch: int
    bundle: int
    mode: Mode
    version: int
    runs: bytes
    answers: int
    spec: int
    def __init__(self, serial: _Optional[int] = ..., lane: _Optional[str] = ..., epoch: _Optional[int] = ..., bundle: _Optional[int] = ..., mode: _Optional[_Union[Mode, str]] = ..., version: _Optional[int] = ..., runs: _Optional[bytes] = ..., answers: _Optional[int] = ..., spec: _Optional[int] = ...) -> None: ...

class Grants(_message.Message):
    __slots__ = ("lane", "epoch", "rows", "runs")
    LANE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    lane: str
    epoch: int
    rows: bytes
    runs: bytes
    def __init__(self, lane: _Optional[str] = ..., epoch: _Optional[int] = ..., rows: _Optional[bytes] = ..., runs: _Optional[bytes] = ...) -> None: ...

class Surrender(_message.Message):
    __slots__ = ("lane",)
    LANE_FIELD_NUMBER: _ClassVar[int]
    lane: str
    def __init__(self, lane: _Optional[str] = ...) -> None: ...

class AskTrace(_message.Message):
    __slots__ = ("id", "seconds")
    ID_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    id: int
    seconds: float
    def __init__(self, id: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Refuse(_message.Message):
    __slots__ = ("lane", "answers", "code", "message")
    LANE_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    lane: str
    answers: int
    code: str
    message: str
    def __init__(self, lane: _Optional[str] = ..., answers: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Alive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Closed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
