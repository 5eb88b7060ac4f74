"""Text from outside: arguments, files and bodies of requests."""


def is_unicode(text: str) -> bool:
    """Whether a message can carry it: arguments that are no UTF-8 reach Python as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
