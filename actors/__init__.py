"""RUN: Ray actors, thin.  They carry messages and perform what ``elastic.control`` decided; they decide nothing."""

from elastic.imports import check_packages

check_packages()  # in every process that Ray starts for us, before an import from a folder that takes our place fails with less to say
