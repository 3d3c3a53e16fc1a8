"""`python -m finetune_lora ARGUMENTS` is `finetune ARGUMENTS`."""

import os
import subprocess
import sys

from . import find_binary

if __name__ == "__main__":
    command = [find_binary(), *sys.argv[1:]]
    if os.name == "nt":
        sys.exit(subprocess.run(command).returncode)
    os.execv(command[0], command)
