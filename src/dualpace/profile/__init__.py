"""What steps of this model take on this machine: probes, the table they fill, its fingerprint."""
