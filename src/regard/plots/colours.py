"""Colours of text, lines and empty cells in all figures."""

INK, GREY, LINE, NOTHING = "#16181d", "#6f7580", "#d9dce1", "#f3f4f6"
