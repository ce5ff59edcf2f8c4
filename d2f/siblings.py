"""The toolkit's packages lie beside each other; a user's file of the same name can hide one."""

from __future__ import annotations

import os
from importlib.util import find_spec

HERE = os.path.dirname(os.path.abspath(__file__))  # links as they are: those of an editable install


class HiddenPackageError(ImportError):
    """Python finds something else by the name of one of the toolkit's packages."""


def require(*names: str) -> None:
    """Raise HiddenPackageError, naming what hides what, where Python would import something else
    by the name of one of these packages. Imports none of them; one that is not there at all is
    for the import to report."""
    for name in names:
        spec = find_spec(name)
        if spec is None:
            continue
        places = list(spec.submodule_search_locations or ())
        place = places[0] if places else str(spec.origin)  # of a package its folder, else the file
        own = os.path.join(os.path.dirname(HERE), name)
        if os.path.realpath(place) != os.path.realpath(own):
            raise HiddenPackageError(hides(place, name, own))


def hides(place: object, name: str, own: object) -> str:
    """What to say of a file or folder `place` that hides the package `name`, which is at `own`."""
    return (
        f"{place} hides the package {name} of d2f-toolkit ({own}): rename it, or call the command "
        "d2f, which does not look in the working folder"
    )
