"""Exceptions out of signal handlers: they may come between any two instructions, and are unrelated to these."""

from __future__ import annotations


def let_through(error: BaseException) -> None:
    """Raise the exception unchanged if a signal handler raised it; otherwise, caught around the user's code, it would
    be taken for an error of that code.

    Python calls a handler with a signal's number and the very frame that it interrupts, which identifies it here.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        interrupted, trace = trace.tb_frame, trace.tb_next
        code, known = trace.tb_frame.f_code, trace.tb_frame.f_locals
        given = [known.get(name) for name in code.co_varnames[: code.co_argcount + bool(code.co_flags & _VARARGS)]]
        if any(value is interrupted for item in given for value in (item if type(item) is tuple else (item,))):
            raise error


_VARARGS = 0x04  # inspect.CO_VARARGS, without the import
