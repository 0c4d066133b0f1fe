"""gRPC in front of the engine. Everything here runs on the event loop."""
