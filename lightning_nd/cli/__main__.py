"""``python -m lightning_nd.cli``."""

import sys

from lightning_nd.cli.main import main

sys.exit(main())
