"""The NeMo Megatron launcher's way in: ``python launcher/main.py training=gpt3/126m cluster=bcm``.

The same as ``slipway launch`` with these arguments.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python put this folder there; from it, `plan`, `config` and others would shadow other modules.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

    from launcher.cli.app import main, use_utf8

    use_utf8()
    sys.exit(main(["launch", *sys.argv[1:]]))
