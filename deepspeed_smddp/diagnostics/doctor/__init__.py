"""``smddp doctor`` over the ranks of a job: what each rank is, where ranks differ, the links."""
