"""Operations whose result for a row is the same bits whatever other rows are computed with it."""
