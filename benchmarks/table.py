"""Plain-text tables."""


def render(headers: list[str], rows: list[list[str]], left: tuple[int, ...] = (0,)) -> str:
    """A table with the columns `left` to the left and the others, numbers, to the right.

    A row of two cells under more than two headers is a name and a note, which may be long.
    """
    full = [row for row in [headers, *rows] if len(row) == len(headers)]
    widths = [max(len(row[column]) for row in full) for column in range(len(headers))]
    widths[0] = max(len(row[0]) for row in [headers, *rows])

    def line(row: list[str]) -> str:
        if len(row) < len(headers):
            return f"{row[0].ljust(widths[0])}  {row[1]}"
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(headers), rule, *(line(row) for row in rows)])
