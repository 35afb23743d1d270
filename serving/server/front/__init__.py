"""What answers on the ports: gRPC, HTTP, health, and every call on its way in and out."""
