"""What `prefixcache bench` measures: the service through gRPC, against references from the same run."""
