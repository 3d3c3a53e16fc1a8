//! `strftime` in the C locale and UTC: dates that templates print, without a time zone database.

use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Seconds since 1970, UTC.
pub fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs() as i64)
}

/// (year, month 1..=12, day 1..=31) of a day counted from 1970 (Howard Hinnant's civil_from_days).
fn civil(days: i64) -> (i64, i64, i64) {
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let doe = z.rem_euclid(146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    (yoe + era * 400 + i64::from(month <= 2), month, doy - (153 * mp + 2) / 5 + 1)
}

/// A moment in the words of a format; `%-d` and its kin leave the padding out, unknown letters stay as they are.
pub fn strftime(seconds: i64, format: &str) -> String {
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    let (hour, minute, weekday) = (second / 3600, second / 60 % 60, (days + 4).rem_euclid(7) as usize);
    let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334][month as usize - 1];
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let yearday = before + day + i64::from(leap && month > 2);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut letter = chars.next();
        let bare = letter == Some('-');
        if bare {
            letter = chars.next();
        }
        let mut number = |width: usize, n: i64| {
            let width = if bare { 1 } else { width };
            let _ = write!(out, "{n:0width$}");
        };
        match letter {
            Some('Y') => number(4, year),
            Some('m') => number(2, month),
            Some('d') => number(2, day),
            Some('y') => number(2, year.rem_euclid(100)),
            Some('H') => number(2, hour),
            Some('I') => number(2, (hour + 11) % 12 + 1),
            Some('M') => number(2, minute),
            Some('S') => number(2, second % 60),
            Some('j') => number(3, yearday),
            Some('f') => out.push_str("000000"),
            Some('w') => number(1, weekday as i64),
            Some('B') => out.push_str(MONTHS[month as usize - 1]),
            Some('b' | 'h') => out.push_str(&MONTHS[month as usize - 1][..3]),
            Some('A') => out.push_str(DAYS[weekday]),
            Some('a') => out.push_str(&DAYS[weekday][..3]),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('F') => out.push_str(&strftime(seconds, "%Y-%m-%d")),
            Some('T') => out.push_str(&strftime(seconds, "%H:%M:%S")),
            Some('D') => out.push_str(&strftime(seconds, "%m/%d/%y")),
            Some('R') => out.push_str(&strftime(seconds, "%H:%M")),
            Some('%') => out.push('%'),
            Some(other) => {
                out.push('%');
                out.push(other);
            }
            None => out.push('%'),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against GNU date -u.
    #[test]
    fn dates_match_gnu_date() {
        for (seconds, expected) in [
            (0, "Thu 01 Jan 1970 001 00:00:00 AM 12"),
            (951_782_399, "Mon 28 Feb 2000 059 23:59:59 PM 11"),
            (951_827_696, "Tue 29 Feb 2000 060 12:34:56 PM 12"),
            (1_735_689_599, "Tue 31 Dec 2024 366 23:59:59 PM 11"),
        ] {
            assert_eq!(strftime(seconds, "%a %d %b %Y %j %H:%M:%S %p %I"), expected);
        }
        assert_eq!(strftime(0, "%-d %B, %A %% %q"), "1 January, Thursday % %q");
    }
}
