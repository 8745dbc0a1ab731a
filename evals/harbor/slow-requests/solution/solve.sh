#!/bin/sh
awk 'NF == 5 && $4 >= 200 && $4 < 300 { n[$3]++; sum[$3] += $5 }
     END { for (path in n) if (n[path] >= 5) printf "%s %.1f\n", path, sum[path] / n[path] }' /app/access.log |
    sort -k2,2nr | head -n3 > /app/slow.txt
