"""WHAT is cached: a radix tree over tokens. Pure Python; knows neither torch nor time."""
