package text

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// strftime formats a time as Python's does in the C locale. Directives it does not know stay as they are.
func strftime(t time.Time, format string) string {
	var b strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' || i+1 == len(format) {
			b.WriteByte(format[i])
			continue
		}
		i++
		unpadded := format[i] == '-' && i+1 < len(format) // glibc: %-d
		if unpadded {
			i++
		}
		s, ok := directive(t, format[i])
		switch {
		case !ok && unpadded:
			s = "%-" + format[i:i+1]
		case !ok:
			s = "%" + format[i:i+1]
		case unpadded:
			if trimmed := strings.TrimLeft(s, "0 "); trimmed != "" {
				s = trimmed
			} else {
				s = "0"
			}
		}
		b.WriteString(s)
	}
	return b.String()
}

func directive(t time.Time, c byte) (string, bool) {
	layouts := map[byte]string{
		'a': "Mon", 'A': "Monday", 'b': "Jan", 'B': "January", 'h': "Jan", 'c': "Mon Jan _2 15:04:05 2006",
		'd': "02", 'D': "01/02/06", 'e': "_2", 'F': "2006-01-02", 'H': "15", 'I': "03", 'm': "01", 'M': "04",
		'p': "PM", 'r': "03:04:05 PM", 'R': "15:04", 'S': "05", 'T': "15:04:05", 'x': "01/02/06", 'X': "15:04:05",
		'y': "06", 'Y': "2006",
	}
	if layout, ok := layouts[c]; ok {
		return t.Format(layout), true
	}
	year, week := t.ISOWeek()
	switch c {
	case '%':
		return "%", true
	case 'n':
		return "\n", true
	case 't':
		return "\t", true
	case 'f':
		return fmt.Sprintf("%06d", t.Nanosecond()/1000), true
	case 'j':
		return fmt.Sprintf("%03d", t.YearDay()), true
	case 's':
		return strconv.FormatInt(t.Unix(), 10), true
	case 'u':
		return strconv.Itoa((int(t.Weekday())+6)%7 + 1), true
	case 'w':
		return strconv.Itoa(int(t.Weekday())), true
	case 'U':
		return fmt.Sprintf("%02d", (t.YearDay()+6-int(t.Weekday()))/7), true
	case 'W':
		return fmt.Sprintf("%02d", (t.YearDay()+6-(int(t.Weekday())+6)%7)/7), true
	case 'G':
		return fmt.Sprintf("%04d", year), true
	case 'V':
		return fmt.Sprintf("%02d", week), true
	case 'C':
		return fmt.Sprintf("%02d", t.Year()/100), true
	case 'z', 'Z':
		// Python's datetime.now() knows no zone.
		return "", true
	}
	return "", false
}
