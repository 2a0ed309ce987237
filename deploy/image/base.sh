#!/bin/sh
# Removes from a Debian with Python what no service needs: installers, programs that change users, Perl, translations and
# manuals. dpkg removes its packages, so its list stays true. Licences stay.
rm -rf /usr/local/bin/pip* /usr/local/bin/idle* /usr/local/lib/python3*/ensurepip /usr/local/lib/python3*/idlelib \
    /usr/local/lib/python3*/site-packages/pip /usr/local/lib/python3*/site-packages/pip-*
for package in 'python3*-venv' python3-pip-whl python3-setuptools-whl python3-pip python3-distutils python3-lib2to3 \
    apt 'libapt-pkg*' gpgv sqv debian-archive-keyring adduser e2fsprogs libext2fs2* logsave mount passwd login 'login.defs' \
    util-linux util-linux-extra bsdutils debconf perl-base; do
    dpkg-query -W -f '${db:Status-Abbrev} ${binary:Package}\n' "$package" 2>/dev/null | sed -n 's/^ii *//p'
done >/removed
# shellcheck disable=SC2046
test ! -s /removed || dpkg --purge --force-depends --force-remove-essential --force-remove-protected $(cat /removed)
rm -rf /removed /usr/share/locale /usr/share/man /usr/share/info /usr/share/lintian /usr/share/bug /etc/apt /var/lib/apt /var/cache/apt \
    /var/cache/debconf /var/lib/dpkg/*-old /var/log/*
find /usr/share/doc -type f ! -name copyright -delete
find / -xdev -type f -perm /6000 -exec chmod ug-s {} +
