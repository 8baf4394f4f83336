"""Hold what organizations that do not trust one another add to a run: certificates, policies, masked sums, receipts."""
