"""Reports of studies: tables, figures, a verdict and one page, from result files; runs nothing."""
