"""`python -m prefixcache` is the same as `prefixcache`."""

import sys

from prefixcache.cli import main

if __name__ == "__main__":
    sys.exit(main())
