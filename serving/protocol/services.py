"""A gRPC service's classes for Python, made from the service's descriptor.

They are the classes that protoc's plugin for Python writes out, for services whose methods take one
message and answer with one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass


def stub_class(service: ServiceDescriptor) -> type[Any]:
    """A class of clients, made of a channel: a method of each name that sends and waits."""

    def __init__(self: Any, channel: Any) -> None:  # noqa: N807 - of the class below
        for name, method in service.methods_by_name.items():
            call = channel.unary_unary(
                f"/{service.full_name}/{name}",
                request_serializer=_request(method).SerializeToString,
                response_deserializer=_response(method).FromString,
            )
            setattr(self, name, call)

    return type(f"{service.name}Stub", (), {"__init__": __init__})


def servicer_class(service: ServiceDescriptor) -> type[Any]:
    """A class of servers whose methods answer UNIMPLEMENTED until a subclass has its own."""

    def unimplemented(_self: Any, _request: Any, context: Any) -> Any:
        context.set_code(grpc.StatusCode.UNIMPLEMENTED)
        context.set_details("Method not implemented!")
        raise NotImplementedError("Method not implemented!")

    return type(
        f"{service.name}Servicer", (), dict.fromkeys(service.methods_by_name, unimplemented)
    )


def registration(service: ServiceDescriptor) -> Callable[[Any, Any], None]:
    """A function that lets a server (its second argument) answer by a servicer (its first)."""

    def add(servicer: Any, server: Any) -> None:
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                getattr(servicer, name),
                request_deserializer=_request(method).FromString,
                response_serializer=_response(method).SerializeToString,
            )
            for name, method in service.methods_by_name.items()
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service.full_name, handlers),)
        )

    return add


def _request(method: MethodDescriptor) -> Any:
    return GetMessageClass(method.input_type)


def _response(method: MethodDescriptor) -> Any:
    return GetMessageClass(method.output_type)
