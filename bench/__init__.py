"""Runs against whole topologies, models of them, and plots for the docs; `prefixcache bench` measures one server."""
