"""A file system whose server never answers, for a process: ``hung_mount.py PID DIRECTORY``.

Whoever looks at the directory, in the mount namespace of the process, waits until this program is killed.
"""

import ctypes
import os
import signal
import sys

_NEW_MOUNT_NAMESPACE = 0x20000


def mount(pid: str, directory: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    if libc.setns(namespace, _NEW_MOUNT_NAMESPACE):
        raise OSError(ctypes.get_errno(), "setns")
    server = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"hung", os.fsencode(directory), b"fuse", 0, options):
        raise OSError(ctypes.get_errno(), "mount")


if __name__ == "__main__":
    mount(*sys.argv[1:3])
    print("mounted", flush=True)
    signal.pause()
