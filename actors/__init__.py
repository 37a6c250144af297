"""RUNS: thin Ray actors.  They carry messages and perform what ``elastic.control`` decided; they decide
nothing themselves.
"""

from elastic.code.imports import check_packages

# in every process that Ray starts for us: a clear error for a shadowed package, before an obscure one
check_packages()
