"""Where the protocols' messages are registered: a pool of their own.

protobuf's default pool holds a message's name once for the whole process.  NVIDIA's and KServe's
clients bring messages of the names that `inference.proto` has, so one process could import only one
of them.  A name in this pool is in nobody's way.
"""

from typing import Any

from google.protobuf.descriptor_pool import DescriptorPool

POOL: Any = DescriptorPool()  # protobuf does not type its methods
