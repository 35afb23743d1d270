"""Go and Java as Debian 12 packages them, with their gRPC libraries: for tests of programs in these languages."""

import os
import re
import shutil
from pathlib import Path

from tests import REPOSITORY

JAVA_ARGUMENTS = REPOSITORY / "examples/java/debian.args"
GO_LIBRARIES = Path("/usr/share/gocode")
GO_ENVIRONMENT = {"GO111MODULE": "off", "GOFLAGS": ""}


def without(programs, files):
    """What of it this machine lacks, as the reason of a skip; empty if nothing."""
    lacking = [name for name in programs if shutil.which(name) is None]
    lacking += [str(path) for path in files if not Path(path).exists()]
    return f"{', '.join(lacking)}: not installed" if lacking else ""


def go_lacks(*more):
    grpc = GO_LIBRARIES / "src/google.golang.org/grpc"
    # The plug-in that writes messages and services at once, which newer releases have split.
    plug_in = GO_LIBRARIES / "src/github.com/golang/protobuf/protoc-gen-go/grpc"
    return without(["go", *more], [grpc, plug_in])


def java_lacks(*more):
    jars = re.findall(r"/usr/share/java/[\w.-]+\.jar", JAVA_ARGUMENTS.read_text())
    assert jars
    return without(["java", "javac", *more], jars)


def go_environment(*folders):
    """For ``go build`` with Debian's libraries and packages below ``src`` of ``folders``."""
    path = ":".join(map(str, [*folders, GO_LIBRARIES]))
    return os.environ | GO_ENVIRONMENT | {"GOPATH": path}
