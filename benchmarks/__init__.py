"""Speed against limits and peers, each row dated and naming the hardware."""
