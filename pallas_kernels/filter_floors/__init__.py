"""The filters of sampling without a sort: the score from which tokens are kept, and what the kept ones weigh."""
