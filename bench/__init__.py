"""Long runs against whole topologies; `prefixcache bench` measures one server."""
