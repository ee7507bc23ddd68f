"""Lightning itself: imported here first, so that a machine without it is told what to install."""

try:
    import lightning
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "onefold.lightning needs Lightning, which is not installed: pip install 'lightning>=2.6'. "
        "The package pytorch_lightning alone has other classes, and is not supported",
        name=error.name,
    ) from error

VERSION = lightning.__version__
