"""A small disk that can be full: a tmpfs that only this process and its children see, and that goes with them."""

import ctypes
import os
import sys

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000


def private_mounts():
    """From now on this process may mount, for itself; call it before there are threads.

    Returns:
        Why not, or None.
    """
    if sys.platform != "linux":
        return "only Linux mounts for one process"
    user, group = os.geteuid(), os.getegid()
    try:
        _call("unshare", _CLONE_NEWNS | (_CLONE_NEWUSER if user else 0))
        if user:
            for name, text in ("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1"):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    except OSError as error:
        return f"mounting is not permitted ({error.strerror})"
    return None


def mount(folder, size):
    """An empty disk of so many bytes at a folder."""
    _call("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode())


def unmount(folder):
    """Take it away with what is on it."""
    _call("umount2", os.fsencode(folder), 0)


def fill(folder, leave):
    """Take all of the disk but so many bytes; returns the file that takes them."""
    ballast = folder / "ballast"
    room = os.statvfs(folder)
    size = room.f_bavail * room.f_frsize - int(leave)
    with ballast.open("wb") as file:
        if size > 0:
            os.posix_fallocate(file.fileno(), 0, size)
    return ballast


def _call(name, *args):
    libc = ctypes.CDLL(None, use_errno=True)
    values = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in args]
    if getattr(libc, name)(*values):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
