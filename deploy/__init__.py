"""How prefixcache is run: images, compose and Kubernetes, Prometheus and Grafana, and all of it on one machine."""
