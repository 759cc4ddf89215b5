"""refuse_io_uring.py COMMAND...: run a command that may not use io_uring, as in Docker.

Installs a seccomp filter that answers EPERM to io_uring_setup, io_uring_enter and
io_uring_register (seccomp(2)), as Docker's default profile does, then executes the command.
"""

import ctypes
import errno
import os
import sys

PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
LOAD_NUMBER = 0x20          # BPF_LD | BPF_W | BPF_ABS, offset 0: the system call's number
JUMP_IF_AT_LEAST = 0x35     # BPF_JMP | BPF_JGE | BPF_K
JUMP_IF_ABOVE = 0x25        # BPF_JMP | BPF_JGT | BPF_K
RETURN = 0x06               # BPF_RET | BPF_K
ALLOW = 0x7FFF0000
ERROR = 0x00050000


class Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jump_true", ctypes.c_ubyte),
                ("jump_false", ctypes.c_ubyte), ("operand", ctypes.c_uint)]


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(Instruction))]


def refuse(first, last, error):
    """Answer `error` to the system calls numbered first to last, from now on and in children."""
    libc = ctypes.CDLL(None, use_errno=True)
    instructions = (Instruction * 5)(
        Instruction(LOAD_NUMBER, 0, 0, 0),
        Instruction(JUMP_IF_AT_LEAST, 0, 2, first),
        Instruction(JUMP_IF_ABOVE, 1, 0, last),
        Instruction(RETURN, 0, 0, ERROR | error),
        Instruction(RETURN, 0, 0, ALLOW))
    program = Program(len(instructions), instructions)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
            PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp filter: {os.strerror(number)}")


def refuse_io_uring(error=errno.EPERM):
    """io_uring_setup, io_uring_enter and io_uring_register: 425 to 427 on all but alpha."""
    refuse(425, 427, error)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    refuse_io_uring()
    os.execvp(sys.argv[1], sys.argv[1:])
