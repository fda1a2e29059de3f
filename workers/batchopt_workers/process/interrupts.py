"""An exception out of a signal handler: it may come between any two instructions, and is about none of them."""

from __future__ import annotations


def let_through(error: BaseException) -> None:
    """Raise the exception as it is if a signal handler raised it: one that is caught around code of the user's is taken
    for that code's else.

    Python calls a handler with a signal's number and the very frame that it interrupts, which is how it is known here.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        interrupted, trace = trace.tb_frame, trace.tb_next
        code, known = trace.tb_frame.f_code, trace.tb_frame.f_locals
        given = [known.get(name) for name in code.co_varnames[: code.co_argcount + bool(code.co_flags & _VARARGS)]]
        if any(value is interrupted for item in given for value in (item if type(item) is tuple else (item,))):
            raise error


_VARARGS = 0x04  # inspect.CO_VARARGS, without the import
