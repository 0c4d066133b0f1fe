"""The topology of docker-compose.yml as plain processes on loopback."""
